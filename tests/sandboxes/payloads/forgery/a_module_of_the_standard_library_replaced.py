#: name = "a module of the standard library replaced"
#: right = ["ok", "error", "protocol"]
#: following = ["ok", "error"]
#: honest = false
#: uses = ["frames"]

for name in list(sys.modules): sys.modules[name] = None
