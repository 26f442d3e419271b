"""What stays, and for how long: thinning, caps, removal, sizes, backups."""
