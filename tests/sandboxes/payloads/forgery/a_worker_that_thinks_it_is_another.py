#: name = "a worker that thinks it is another"
#: right = ["error", "protocol"]
#: uses = ["frames"]

worker().pid = 1
