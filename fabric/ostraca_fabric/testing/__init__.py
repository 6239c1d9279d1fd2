"""What ships for tests: ports that do what they promise in memory, and fail where a test says."""
