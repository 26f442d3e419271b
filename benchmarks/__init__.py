"""What Vitals costs, measured on the machine it runs on: `make bench`."""
