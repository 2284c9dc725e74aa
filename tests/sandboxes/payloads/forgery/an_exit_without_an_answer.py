#: name = "an exit without an answer"
#: right = ["error"]
#: lost = true
#: uses = ["frames"]

os._exit(0)
