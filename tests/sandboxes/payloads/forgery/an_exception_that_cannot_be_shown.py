#: name = "an exception that cannot be shown"
#: right = ["error"]
#: lost = false
#: uses = ["frames"]

class E(Exception):
    def __str__(self): raise self
raise E()
