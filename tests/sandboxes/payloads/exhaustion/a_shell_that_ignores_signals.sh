#: name = "a shell that ignores signals"
#: right = ["timeout"]
#: timeout_s = 0.2

trap '' INT TERM HUP; sleep 60; sleep 60
