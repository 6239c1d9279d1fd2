"""Location of blocks: route keys to shard owners, query, combine answers."""
