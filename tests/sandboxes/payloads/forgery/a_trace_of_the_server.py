#: name = "a trace of the server"
#: right = ["ok", "error", "protocol"]
#: following = ["ok", "error", "protocol"]
#: honest = false
#: uses = ["frames"]

sys.settrace(lambda frame, *_: (_ for _ in ()).throw(KeyError))
