#include "csrc/barrier/circle.h"

#include <algorithm>
#include <tuple>

namespace jaxmp::barrier {
namespace {

// Arrivals of a process that are kept for those who lack them.
constexpr size_t kArrivalsKept = 32;

void AppendRange(std::vector<uint64_t>* ranks, uint64_t place, uint64_t number, uint64_t size) {
  const size_t n = ranks->size();
  if (n >= 3 && (*ranks)[n - 1] == number && ((*ranks)[n - 3] + (*ranks)[n - 2]) % size == place) {
    ++(*ranks)[n - 2];
  } else {
    ranks->insert(ranks->end(), {place, 1, number});
  }
}

}  // namespace

Circle::Circle(std::vector<int> members, int process) : members_(std::move(members)), lines_(members_.size()) {
  const size_t size = members_.size();
  me_ = static_cast<size_t>(std::lower_bound(members_.begin(), members_.end(), process) - members_.begin());
  std::set<int> links;
  for (size_t reach = 1; reach < size; reach *= 2, ++rounds_) {
    links.insert(members_[Place(reach)]);
    links.insert(members_[(me_ + reach) % size]);
  }
  if (is_complete()) links.insert(members_.begin(), members_.end());
  links.erase(process);
  links_.assign(links.begin(), links.end());
  for (size_t i = 0; i < size;) {
    const int stride = i + 1 < size ? members_[i + 1] - members_[i] : 1;
    size_t end = i + 1;
    while (end < size && members_[end] - members_[end - 1] == stride) ++end;
    packed_.insert(packed_.end(), {static_cast<uint64_t>(members_[i]), end - i, static_cast<uint64_t>(stride)});
    i = end;
  }
}

std::vector<int> Circle::Unpack(const std::vector<uint64_t>& packed, int nprocesses) {
  std::vector<int> members;
  const auto most = static_cast<uint64_t>(nprocesses);
  for (size_t i = 0; i + 2 < packed.size(); i += 3) {
    for (uint64_t n = 0; n < std::min(packed[i + 1], most); ++n) {
      members.push_back(static_cast<int>(std::min(packed[i] + n * packed[i + 2], most)));
    }
  }
  const bool is_ascending =
      std::adjacent_find(members.begin(), members.end(), std::greater_equal<int>()) == members.end();
  return is_ascending && !members.empty() && members.back() < nprocesses ? members : std::vector<int>();
}

size_t Circle::Reach(size_t round) const {
  const size_t reach = size_t{1} << round;
  return std::min(reach, members_.size() - reach);
}

std::vector<int> Circle::Targets(size_t round) const {
  if (is_complete()) return links_;
  return {members_[(me_ + (size_t{1} << round)) % members_.size()]};
}

std::vector<int> Circle::Needed(size_t round) const {
  std::vector<int> needed;
  for (size_t back = round ? size_t{1} << (round - 1) : 1; back < size_t{1} << round; ++back) {
    needed.push_back(members_[Place(back)]);
  }
  return needed;
}

uint64_t Circle::Last(int process) const {
  const auto found = std::lower_bound(members_.begin(), members_.end(), process);
  return lines_[static_cast<size_t>(found - members_.begin())].last;
}

void Circle::Add(const Message& arrival) {
  Line& line = lines_[me_];
  ++line.last;
  line.kept.push_back(arrival);
  if (!arrival.text.empty()) texts_[arrival.digest] = arrival.text;
  line.kept.back().text.clear();
  if (line.kept.size() > kArrivalsKept) line.kept.pop_front();
}

bool Circle::Take(int sender, const Message& message, const std::function<void(int, const Message&)>& hear) {
  const size_t size = members_.size();
  uint64_t nranks = 0;
  for (size_t i = 0; i + 2 < message.ranks.size(); i += 3) nranks += std::min<uint64_t>(message.ranks[i + 1], size);
  if (nranks == 0) return false;
  const size_t ntokens = message.tokens.size() / nranks;
  if (!message.text.empty()) {
    texts_[message.digest] = message.text;
    described_[sender].insert(message.digest);
  }
  std::vector<uint64_t>& sent = sent_[sender];
  sent.resize(size);
  bool is_new = false;
  auto token = message.tokens.begin();
  for (size_t i = 0; i + 2 < message.ranks.size(); i += 3) {
    const uint64_t number = message.ranks[i + 2];
    for (uint64_t n = 0; n < std::min<uint64_t>(message.ranks[i + 1], size); ++n, token += int64_t(ntokens)) {
      const size_t place = (message.ranks[i] + n) % size;
      Line& line = lines_[place];
      sent[place] = std::max(sent[place], number);  // it has them
      if (number <= line.last || place == me_) continue;
      if (number != line.last + 1) line.kept.clear();
      line.last = number;
      Message one{message.kind,
                  message.place,
                  message.key,
                  message.run,
                  message.count,
                  message.digest,
                  {token, token + int64_t(ntokens)},
                  "",
                  {},
                  {}};
      line.kept.push_back(one);
      if (line.kept.size() > kArrivalsKept) line.kept.pop_front();
      if (!is_new) one.text = texts_[message.digest];
      is_new = true;
      hear(members_[place], one);
    }
  }
  return is_new;
}

std::vector<Message> Circle::ForRound(size_t round, int process) {
  return Unsent(process, is_complete() ? 1 : Reach(round));
}

// Arrivals that are equal, but for who has come, are one message. Those of one process keep their order.
std::vector<Message> Circle::Unsent(int process, size_t nplaces) {
  using Fields = std::tuple<uint64_t, Kind, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, size_t>;
  std::map<Fields, Message> messages;
  std::vector<uint64_t>& sent = sent_[process];
  sent.resize(members_.size());
  for (size_t back = nplaces; back-- > 0;) {
    const size_t place = Place(back);
    const Line& line = lines_[place];
    if (sent[place] >= line.last || members_[place] == process) continue;
    uint64_t number = line.last - line.kept.size();
    for (const Message& one : line.kept) {
      if (++number <= sent[place]) continue;
      Message& all =
          messages[{number, one.kind, one.place, one.key, one.run, one.count, one.digest, one.tokens.size()}];
      if (all.ranks.empty()) {
        all = one;
        all.tokens.clear();
        all.members = packed_;
      }
      AppendRange(&all.ranks, place, number, members_.size());
      all.tokens.insert(all.tokens.end(), one.tokens.begin(), one.tokens.end());
    }
    sent[place] = line.last;
  }
  std::vector<Message> result;
  for (auto& [fields, message] : messages) {
    if (described_[process].insert(message.digest).second) message.text = texts_[message.digest];
    result.push_back(std::move(message));
  }
  return result;
}

Message Circle::Summary() const {
  Message summary;
  summary.kind = Kind::kSummary;
  summary.members = packed_;
  for (size_t place = 0; place < lines_.size(); ++place) {
    AppendRange(&summary.ranks, place, lines_[place].last, lines_.size());
  }
  return summary;
}

Circle::Comparison Circle::Compare(int sender, const Message& summary) {
  Comparison found;
  std::vector<uint64_t>& sent = sent_[sender];
  sent.resize(members_.size());
  for (size_t i = 0; i + 2 < summary.ranks.size(); i += 3) {
    for (uint64_t n = 0; n < std::min<uint64_t>(summary.ranks[i + 1], members_.size()); ++n) {
      const size_t place = (summary.ranks[i] + n) % members_.size();
      sent[place] = summary.ranks[i + 2];
      found.has_more = found.has_more || lines_[place].last > sent[place];
      found.lacks = found.lacks || lines_[place].last < sent[place];
    }
  }
  return found;
}

}  // namespace jaxmp::barrier
