#: name = "a chain of exceptions"
#: right = ["error"]
#: lost = false

e = None
for i in range(3_000):
    new = ValueError(i); new.__cause__ = e; e = new
raise e
