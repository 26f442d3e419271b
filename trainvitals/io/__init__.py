"""What touches the machine: private folders, journal, mailbox, spool, run directory, client."""
