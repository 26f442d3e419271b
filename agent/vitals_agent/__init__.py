"""The node agent: keeps what the ranks wrote, samples the node, ships, delivers commands."""
