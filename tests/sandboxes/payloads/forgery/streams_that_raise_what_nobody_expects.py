#: name = "streams that raise what nobody expects"
#: right = ["error", "protocol"]
#: following = ["ok", "error"]
#: honest = false
#: uses = ["frames"]

class No:
    def __getattr__(self, name): raise KeyboardInterrupt
sys.stdout = sys.stderr = No()
1 / 0
