#include "comm/record_json.h"

#include <chrono>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "comm/futex.h"
#include "comm/tcp_links.h"

namespace unshard::comm {

namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormat = 1;

Json entry_json(const FlightRecord& entry) {
  Json json = {{"sequence", entry.sequence}, {"index", entry.index}, {"op", entry.op},          {"detail", entry.detail},
               {"bytes", entry.bytes},       {"step", entry.step},   {"start", entry.started_s}};
  json["end"] = entry.ended_s < 0 ? Json() : Json(entry.ended_s);
  return json;
}

Json group_json(const GroupRecord& group) {
  Json json = {{"name", group.name},           {"ranks", group.ranks}, {"hosts", group.hosts},
               {"transport", group.transport}, {"step", group.step},   {"closed", group.closed}};
  if (!group.phase.empty()) json["phase"] = {{"name", group.phase}, {"detail", group.detail}, {"for_s", group.phase_for_s}};
  if (!group.waiting.empty()) json["waiting"] = {{"where", group.waiting}, {"for_s", group.waiting_for_s}};
  json["peers"] = group.peers;
  json["counts"] = Json::object();
  for (const auto& [op, count] : group.counts) json["counts"][op] = {{"calls", count.first}, {"bytes", count.second}};
  json["entries"] = Json::array();
  for (const auto& entry : group.entries) json["entries"].push_back(entry_json(entry));
  return json;
}

Json links_json() {
  Json links = Json::array();
  for (const auto& link : tcp_links())
    links.push_back({{"peer", link.peer},
                     {"connections", link.connections},
                     {"bytes_sent", link.bytes_sent},
                     {"bytes_received", link.bytes_received},
                     {"send_bytes_per_s", link.send_bytes_per_s},
                     {"round_trip_s", link.round_trip_s},
                     {"retransmitted_segments", link.retransmitted_segments}});
  return links;
}

std::string run_id() {
  const char* id = std::getenv("TORCHELASTIC_RUN_ID");
  return id ? id : "";
}

}  // namespace

double unix_seconds() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::string record_json(const RecordFacts& facts, const std::vector<GroupRecord>& groups) {
  Json json = {{"format", kFormat},          {"rank", facts.options.rank}, {"world_size", facts.options.world_size},
               {"host", facts.options.host}, {"pid", facts.pid},           {"run", run_id()},
               {"started", facts.started},   {"written", unix_seconds()},  {"monotonic", static_cast<double>(monotonic_ns()) * 1e-9},
               {"reason", facts.reason},     {"text", facts.text}};
  if (!facts.failure.empty()) json["failure"] = {{"kind", facts.failure_kind}, {"text", facts.failure}, {"at", facts.failed_at}};
  json["versions"] = facts.options.versions;
  json["position"] = facts.position.empty() ? Json() : Json::parse(facts.position, nullptr, /*allow_exceptions=*/false);
  if (json["position"].is_discarded()) json["position"] = Json();
  json["addresses"] = interface_addresses();
  json["links"] = links_json();
  json["groups"] = Json::array();
  for (const auto& group : groups) json["groups"].push_back(group_json(group));
  return json.dump(1, ' ', false, Json::error_handler_t::replace);  // a text that was cut may end in half a character
}

}  // namespace unshard::comm
