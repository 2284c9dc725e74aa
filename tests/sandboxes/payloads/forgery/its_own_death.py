#: name = "its own death"
#: right = ["killed"]
#: lost = true
#: uses = ["frames"]

os.kill(os.getpid(), 9)
