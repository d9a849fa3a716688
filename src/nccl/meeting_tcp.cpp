// Ranks meet by TCP: rank 0 gathers a greeting of every other rank, then tells all of them the same: the id, or what is
// wrong.
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "nccl/meeting.h"

namespace sparsemla::detail {

namespace {

struct Greeting {
    char magic[8] = {'s', 'm', 'l', 'a', 'a', 's', 'k', '1'};
    std::uint64_t tag = 0;
    std::int32_t rank = 0;
    std::int32_t world = 0;
};
struct Answer {
    char magic[8] = {'s', 'm', 'l', 'a', 'i', 'd', 's', '1'};
    std::int32_t agreed = 0;
    std::int32_t unused = 0;
    char payload[240] = {};  ///< the id, or a text that ends with 0
};
static_assert(sizeof(Greeting) == 24 && sizeof(Answer) == 256);
constexpr int greeting_limit_ms = 2000;  ///< for one that has connected
constexpr int grace_ms = 3000;           ///< rank 0 reports whom it waited for in vain, a little after others' limit

class Socket {
   public:
    Socket() = default;
    explicit Socket(int handle) : handle_(handle) {}
    ~Socket() {
        if (handle_ >= 0) close(handle_);
    }
    Socket(Socket&& other) noexcept : handle_(std::exchange(other.handle_, -1)) {}
    Socket& operator=(Socket&& other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    int get() const { return handle_; }
    bool valid() const { return handle_ >= 0; }

   private:
    int handle_ = -1;
};

std::string system_text() { return std::strerror(errno); }

std::string place_text(const TcpMeeting& meeting) { return meeting.host + ':' + std::to_string(meeting.port); }

[[noreturn]] void fail(const TcpMeeting& meeting, const std::string& required, const std::string& received) {
    throw Error(ErrorKind::io, "meeting at " + place_text(meeting), required, received);
}

bool ready(int socket, short events, int limit_ms) {
    pollfd wait{.fd = socket, .events = events, .revents = 0};
    int got = 0;
    do {
        got = poll(&wait, 1, limit_ms);
    } while (got < 0 && errno == EINTR);
    return got > 0;
}

/// All of it within the limit; sockets do not block.
bool send_all(int socket, const void* data, std::size_t bytes, const Deadline& deadline) {
    const char* next = static_cast<const char*>(data);
    while (bytes != 0) {
        const ssize_t sent = send(socket, next, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0) {
            next += sent;
            bytes -= static_cast<std::size_t>(sent);
        } else if ((errno != EAGAIN && errno != EINTR) || !ready(socket, POLLOUT, deadline.milliseconds(1 << 20)) ||
                   deadline.passed()) {
            return false;
        }
    }
    return true;
}

bool receive_all(int socket, void* data, std::size_t bytes, const Deadline& deadline) {
    char* next = static_cast<char*>(data);
    while (bytes != 0) {
        const ssize_t got = recv(socket, next, bytes, MSG_DONTWAIT);
        if (got > 0) {
            next += got;
            bytes -= static_cast<std::size_t>(got);
            continue;
        }
        if (got == 0 || (errno != EAGAIN && errno != EINTR)) return false;
        if (!ready(socket, POLLIN, deadline.milliseconds(1 << 20))) return false;
    }
    return true;
}

/// On all addresses, of IPv6 and IPv4 where there is IPv6.
Socket listen_on(const TcpMeeting& meeting) {
    std::string problem;
    for (const int family : {AF_INET6, AF_INET}) {
        Socket socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
        if (!socket.valid()) continue;
        const int yes = 1, no = 0;
        setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
        sockaddr_storage address{};
        socklen_t bytes = sizeof(sockaddr_in);
        if (family == AF_INET6) {
            setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no);
            bytes = sizeof(sockaddr_in6);
            reinterpret_cast<sockaddr_in6&>(address).sin6_port = htons(static_cast<std::uint16_t>(meeting.port));
        } else {
            reinterpret_cast<sockaddr_in&>(address).sin_port = htons(static_cast<std::uint16_t>(meeting.port));
        }
        address.ss_family = static_cast<sa_family_t>(family);
        if (bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), bytes) == 0 &&
            listen(socket.get(), 64) == 0)
            return socket;
        problem = system_text();
        if (errno == EADDRINUSE) break;
    }
    fail(meeting, "a port that rank 0 can listen on", problem.empty() ? system_text() : problem);
}

/// Those that have come, by rank; the first is rank 0 itself.
struct Guests {
    std::vector<Socket> sockets;
    std::vector<Socket> strangers;  ///< that do not fit
    std::string misfit;             ///< the first of them; "": none

    int come() const {
        const auto valid = std::count_if(sockets.begin(), sockets.end(), [](const Socket& s) { return s.valid(); });
        return static_cast<int>(valid) + static_cast<int>(strangers.size());
    }

    std::vector<int> missing() const {
        std::vector<int> ranks;
        for (std::size_t rank = 1; rank < sockets.size(); ++rank)
            if (!sockets[rank].valid()) ranks.push_back(static_cast<int>(rank));
        return ranks;
    }
};

/// Reads one greeting. A connection that says something else is dropped; a rank that does not fit is kept apart, to be
/// told so.
void admit(Socket socket, const NcclBootstrap& bootstrap, std::uint64_t tag, Guests& guests) {
    Greeting greeting;
    const Greeting blank;
    if (!receive_all(socket.get(), &greeting, sizeof greeting, Deadline(greeting_limit_ms / 1e3)) ||
        std::memcmp(greeting.magic, blank.magic, sizeof blank.magic) != 0)
        return;
    const std::string who = "rank " + std::to_string(greeting.rank);
    const bool in_world = greeting.rank > 0 && greeting.rank < bootstrap.world;
    std::string misfit;
    if (greeting.tag != tag)
        misfit = who + " of another tag";
    else if (greeting.world != bootstrap.world)
        misfit = who + " of " + std::to_string(greeting.world) + " ranks";
    else if (!in_world)
        misfit = who;
    else if (guests.sockets[static_cast<std::size_t>(greeting.rank)].valid())
        misfit = "two of " + who;
    if (misfit.empty()) {
        guests.sockets[static_cast<std::size_t>(greeting.rank)] = std::move(socket);
    } else {
        guests.strangers.push_back(std::move(socket));
        if (guests.misfit.empty()) guests.misfit = misfit;
    }
}

/// Until all have come, or all that will in the time after the first that does not fit.
Guests receive_guests(const NcclBootstrap& bootstrap, const TcpMeeting& meeting, const Deadline& deadline) {
    const Socket door = listen_on(meeting);
    Guests guests;
    guests.sockets.resize(static_cast<std::size_t>(bootstrap.world));
    std::optional<Deadline> misfit_end;
    while (!deadline.passed() && guests.come() < bootstrap.world - 1 && !(misfit_end && misfit_end->passed())) {
        if (!ready(door.get(), POLLIN, deadline.milliseconds(100))) continue;
        Socket socket(accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (socket.valid()) admit(std::move(socket), bootstrap, hash_of(meeting.tag), guests);
        if (!guests.misfit.empty() && !misfit_end) misfit_end.emplace(grace_ms / 1e3);
    }
    return guests;
}

NcclId host(const NcclBootstrap& bootstrap, const TcpMeeting& meeting, const std::function<NcclId()>& make_id) {
    const Deadline deadline(bootstrap.limit_s);
    const Guests guests = receive_guests(bootstrap, meeting, deadline);
    const std::string required = "ranks 0 .. " + std::to_string(bootstrap.world - 1) + ", " + deadline.text();
    std::string received = guests.misfit;
    if (const std::vector<int> missing = guests.missing(); received.empty() && !missing.empty())
        received = "all but " + ranks_text(missing);
    Answer answer{.agreed = received.empty() ? 1 : 0};
    NcclId id;
    std::optional<Error> problem;
    if (answer.agreed != 0) {
        try {
            id = make_id();
            std::memcpy(answer.payload, id.bytes.data(), id.bytes.size());
        } catch (const Error& error) {
            problem = error;
            answer.agreed = 0;
            received = "rank 0 without an id (" + std::string(error.what()) + ')';
        }
    }
    if (answer.agreed == 0)
        std::strncpy(answer.payload, (received + '\n' + required).c_str(), sizeof answer.payload - 1);
    const Deadline farewell(grace_ms / 1e3);
    for (const auto* sockets : {&guests.sockets, &guests.strangers})
        for (const Socket& socket : *sockets)
            if (socket.valid()) send_all(socket.get(), &answer, sizeof answer, farewell);
    if (problem) throw *problem;
    if (answer.agreed == 0) fail(meeting, required, received);
    return id;
}

/// "" and a connection, or why there is none.
std::string connect_to(const TcpMeeting& meeting, const Deadline& deadline, Socket& connected) {
    addrinfo hints{}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int code = getaddrinfo(meeting.host.c_str(), std::to_string(meeting.port).c_str(), &hints, &found);
    if (code != 0) return gai_strerror(code);
    std::string problem = "no address";
    for (const addrinfo* next = found; next != nullptr && !connected.valid(); next = next->ai_next) {
        Socket socket(::socket(next->ai_family, next->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, next->ai_protocol));
        if (!socket.valid()) continue;
        int error = connect(socket.get(), next->ai_addr, next->ai_addrlen) == 0 ? 0 : errno;
        if (error == EINPROGRESS) {
            socklen_t bytes = sizeof error;
            if (!ready(socket.get(), POLLOUT, deadline.milliseconds(2000)))
                error = ETIMEDOUT;
            else
                getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
        }
        if (error == 0)
            connected = std::move(socket);
        else
            problem = std::strerror(error);
    }
    freeaddrinfo(found);
    return connected.valid() ? "" : problem;
}

NcclId visit(const NcclBootstrap& bootstrap, const TcpMeeting& meeting) {
    const Deadline deadline(bootstrap.limit_s), with_grace(bootstrap.limit_s + grace_ms / 1e3);
    const Greeting greeting{.tag = hash_of(meeting.tag), .rank = bootstrap.rank, .world = bootstrap.world};
    const Answer blank;
    std::string problem;
    while (true) {
        Socket socket;
        Answer answer;
        problem = connect_to(meeting, deadline, socket);
        const bool asked = problem.empty() && send_all(socket.get(), &greeting, sizeof greeting, deadline);
        if (asked && receive_all(socket.get(), &answer, sizeof answer, with_grace) &&
            std::memcmp(answer.magic, blank.magic, sizeof blank.magic) == 0) {
            NcclId id;
            std::memcpy(id.bytes.data(), answer.payload, id.bytes.size());
            if (answer.agreed != 0) return id;
            answer.payload[sizeof answer.payload - 1] = 0;
            const std::string text = answer.payload;
            const std::size_t end = std::min(text.find('\n'), text.size());
            fail(meeting, end < text.size() ? text.substr(end + 1) : "all ranks", text.substr(0, end));
        }
        if (problem.empty()) problem = "a connection that gave no answer";
        if (deadline.passed()) break;
        pause_ms(deadline.milliseconds(50));
    }
    fail(meeting, "the id from rank 0, " + deadline.text(), problem);
}

}  // namespace

NcclId meet_by_tcp(const NcclBootstrap& bootstrap, const TcpMeeting& meeting, const std::function<NcclId()>& make_id) {
    if (meeting.port < 1 || meeting.port > 65535 || meeting.host.empty())
        throw Error(ErrorKind::invalid_argument, meeting.host.empty() ? "tcp.host" : "tcp.port",
                    meeting.host.empty() ? "rank 0's address" : "1 .. 65535",
                    meeting.host.empty() ? "nothing" : std::to_string(meeting.port));
    return bootstrap.rank == 0 ? host(bootstrap, meeting, make_id) : visit(bootstrap, meeting);
}

}  // namespace sparsemla::detail
