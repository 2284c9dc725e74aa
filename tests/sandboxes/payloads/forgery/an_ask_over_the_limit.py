#: name = "an ask over the limit"
#: right = ["protocol"]
#: lost = true
#: uses = ["frames"]

os.write(3, struct.pack('>I', 30) + b'{"id": 1, "ask": 1, "body": 9999999}')
