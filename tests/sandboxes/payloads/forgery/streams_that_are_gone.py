#: name = "streams that are gone"
#: right = ["error"]
#: lost = false
#: following = ["ok", "error"]
#: honest = false
#: uses = ["frames"]

del sys.stdout, sys.stderr
1 / 0
