#: name = "patched streams"
#: right = ["error"]
#: lost = false
#: following = ["ok", "error"]
#: honest = false
#: uses = ["frames"]

class No:
    def write(self, _): raise OSError
sys.stdout = sys.stderr = No()
1 / 0
