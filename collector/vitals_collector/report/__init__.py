"""Hindsight: stored runs and logs of other tools, judged again."""
