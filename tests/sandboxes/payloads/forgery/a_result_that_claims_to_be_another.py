#: name = "a result that claims to be another"
#: right = ["error"]
#: lost = false
#: uses = ["frames"]

class V:
    def __repr__(self): return 7
V()
