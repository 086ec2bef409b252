"""Inside the scheduler process: admission, prefill, rounds, release, conversations."""
