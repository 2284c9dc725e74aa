#: name = "an answer to call true"
#: right = ["ok", "protocol"]
#: following = ["ok", "protocol"]
#: uses = ["frames"]

os.write(3, frame({'id': True, 'done': 0}))
