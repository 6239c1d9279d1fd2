"""Read and write drives: files and block devices, health, exports of file enclosures."""
