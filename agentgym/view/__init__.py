"""The local page on runs: a server that reads their folders, and what the browser shows of them."""
