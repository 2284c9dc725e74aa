#: name = "a flood by children that ignore all"
#: right = ["output_limit"]
#: lost = false

trap '' INT TERM PIPE HUP; for i in 1 2 3 4; do yes & yes >&2 & done; yes
