"""Support code of any process: tasks, threads, memory, files, error texts."""
