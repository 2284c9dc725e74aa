#: name = "an answer given twice"
#: right = ["ok", "protocol"]
#: following = ["ok", "protocol"]
#: uses = ["frames"]

os.write(3, frame({'id': call, 'done': 0}) * 2)
