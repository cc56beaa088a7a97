"""Model packages on disk: find, list, verify, install under a lock."""
