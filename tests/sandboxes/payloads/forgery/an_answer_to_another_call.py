#: name = "an answer to another call"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame({'id': call + 1, 'done': 0}))
