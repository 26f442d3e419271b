"""``python -m vitals_agent``: the agent without the ``vitals`` console script."""

from vitals_agent.cli import main

if __name__ == "__main__":
    main()
