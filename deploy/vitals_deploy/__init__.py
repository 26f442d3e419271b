"""Generates deployment files from the catalog: rules, dashboards, units, batch scripts.

Every generator is a pure function from settings to file contents. The results with the default
settings are in the directories next to this package.
"""
