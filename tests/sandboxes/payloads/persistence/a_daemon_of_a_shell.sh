#: name = "a daemon of a shell"
#: right = ["ok"]

setsid nohup sleep 99.25 >/dev/null 2>&1 & (trap '' HUP TERM INT; setsid sleep 99.25) & disown -a; true
