#: name = "a value whose repr leaves"
#: right = ["error"]
#: lost = true
#: uses = ["frames"]

class V:
    def __repr__(self): os._exit(0)
V()
