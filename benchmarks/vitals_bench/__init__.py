"""What Vitals costs and what it holds, measured on the machine it runs on: `make bench`."""
