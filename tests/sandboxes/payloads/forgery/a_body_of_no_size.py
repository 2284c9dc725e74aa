#: name = "a body of no size"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, frame({'id': call, 'ask': 1, 'body': None}))
