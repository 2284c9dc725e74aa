#: name = "a stopped group of processes"
#: right = ["timeout"]
#: timeout_s = 0.2

sleep 60 & sleep 60 & kill -STOP 0
