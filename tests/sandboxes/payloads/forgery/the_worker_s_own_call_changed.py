#: name = "the worker's own call changed"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

worker().call = 999
