"""Lets coding assistants read runs: an MCP server, and a skill file."""
