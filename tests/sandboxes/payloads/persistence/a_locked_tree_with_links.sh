#: name = "a locked tree with links"
#: right = ["ok"]

mkdir -p a/b/c; touch a/b/c/f a/f; ln -s /etc a/l; ln a/f a/b/hard; mkfifo a/p; chmod 000 a/b/c a/b a
