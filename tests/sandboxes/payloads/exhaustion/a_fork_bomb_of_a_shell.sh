#: name = "a fork bomb of a shell"
#: right = ["timeout", "error", "killed"]
#: timeout_s = 0.5
#: kinds = ["bubblewrap", "docker"]

f() { f | f & }; f; sleep 60
