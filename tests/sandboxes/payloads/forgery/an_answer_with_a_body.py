#: name = "an answer with a body"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame({'id': call, 'done': 0}, b'x'))
