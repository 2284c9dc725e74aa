#: name = "a hello"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame({'hello': 1, 'python': '9'}))
