#: name = "an exit code that cannot be shown"
#: right = ["error"]
#: lost = false
#: uses = ["frames"]

class E:
    def __str__(self): raise self
raise SystemExit(E())
