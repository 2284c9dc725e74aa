#: name = "an answer of text"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame({'id': call, 'done': '0'}))
