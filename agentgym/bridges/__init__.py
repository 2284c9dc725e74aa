"""Other worlds' environments and clients, one small file each."""
