#: name = "a stop for all"
#: right = ["ok", "timeout"]
#: following = ["ok", "timeout"]
#: timeout_s = 0.5
#: kinds = ["bubblewrap", "docker", "runsc"]

kill -STOP -1
