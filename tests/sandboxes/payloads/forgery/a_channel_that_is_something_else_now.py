#: name = "a channel that is something else now"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.dup2(0, 3)
