"""Host headers, and whether a server on loopback is meant by them."""

OWN = ("127.0.0.1", "127.0.0.1:8050", "localhost", "LocalHost:1", "[::1]:80", "[::1]", "192.168.1.7")
FOREIGN = (
    "",
    ":80",
    "[]",
    "evil.example",
    "evil.example:8050",
    "localhost.evil.example",
    "127.0.0.1.evil.example:8050",
    "1.2.3.4.evil",
    "localhost:80:80",
    "localhost:http",
    "[localhost",
    "127.0.0.1]",
    "user@localhost",
)
HOSTS = [(host, 200) for host in OWN] + [(host, 403) for host in FOREIGN]
