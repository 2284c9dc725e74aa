#: name = "a body of a negative size"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame({'id': call, 'done': 0, 'body': -1}))
