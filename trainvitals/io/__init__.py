"""I/O of the core: private directories, journal, mailbox, spool, run directory, client."""
