"""Real small trainings of each framework; ``VARIANTS`` of each module follow the one script."""
