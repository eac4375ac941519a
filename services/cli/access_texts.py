"""What people read of the options of `AccessConfig`, and of those beside it."""

from services.cli.config_options import Text

ACCESS_TEXTS = {
    "tls_cert": Text(
        "Certificate of this process (PEM, with the intermediate ones): it speaks TLS then. Read again on change.", "PATH"
    ),
    "tls_key": Text("Key of the certificate (PEM, not encrypted).", "PATH"),
    "tls_ca": Text(
        "CA (PEM) that the other processes of the system are proven by; they must have certificates, or tokens. Read again on change.",
        "PATH",
    ),
    "tls_peer_name": Text("DNS name that the certificates of all processes of the system have, wherever they run.", "NAME"),
    "tokens": Text(
        "File of bearer tokens that callers must have one of: lines of TOKEN PRINCIPAL ROLES. Read again on change.", "PATH"
    ),
    "reflection": Text("Tell anybody which services and messages there are (gRPC server reflection)."),
    "health_listen": Text("Another address for gRPC health alone, in plain text, for probes that can do no TLS.", "HOST:PORT"),
}

TOKEN_FILE = Text("File with the token that this process shows to the others. Read at every call.", "PATH")
