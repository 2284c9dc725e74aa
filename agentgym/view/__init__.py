"""The local web page for inspecting runs: a server that reads their folders, and the files that the browser loads."""
