#: name = "a worker whose methods are ours"
#: right = ["ok"]
#: lost = false
#: following = ["ok", "error"]
#: honest = false
#: uses = ["frames"]

type(worker()).run = lambda self, source: 0
type(worker()).execute = None
